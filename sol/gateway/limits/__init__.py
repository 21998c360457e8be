"""How much each key, tenant and model may ask for, and what they have used.

`ledger` has the words, `memory` and `redis_ledger` keep count, `failover` says what happens when Redis is away.
`policy` knows which limits a request falls under, `estimate` how long its answer may become, `cost` what tokens cost.
`keys` and `usage` keep API keys and usage records in a database, and go on while it is away. `stage` is what the
pipeline sees.
"""
