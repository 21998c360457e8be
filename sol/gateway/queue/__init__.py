"""Who waits, and who goes first: classes, the queue of engines, and credits for what these may have at once.

`classes` finds out the class of a call; `fair` keeps shares between classes and tenants; `credits` learns how many
requests an engine takes well; `dispatcher` puts these together on a clock it is given; `stage` adapts it to calls.
"""
