"""What can be seen of the gateway from outside: metrics, traces, a line for each request.

`metrics` counts as calls pass, in plain numbers; `state` reads what the other parts know when somebody asks; `page`
writes both in Prometheus' text format. `traces` and `access` are off unless they are configured. `stage` joins them to
the pipeline.
"""
