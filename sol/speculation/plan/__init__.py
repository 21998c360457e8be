"""What to draft and how much of it to verify: decided from measured times and acceptance, without a tensor."""
