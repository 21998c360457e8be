"""The fused ops in Triton, for Ampere and newer GPUs."""
