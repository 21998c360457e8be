"""Which engine answers a call: `engine` is one of them with all that is known of it (`latency`, `breaker`, `health`),
`prober` asks them how they are, `fleet` is all of them by model and who may be asked now, `affinity` who has a prompt's
prefix, `tasks` what kind of work a call is, `router` the choice."""
