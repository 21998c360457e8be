"""Service levels: what classes of requests are promised, and how well it is kept.

`config` says what is promised, `monitor` what was kept of it in sliding windows, `stage` tells the monitor of calls,
`autoscaling` says how many engines it would take.
"""
