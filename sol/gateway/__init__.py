"""One front for any number of engines and models: `sol gateway --config gateway.yaml`.

`call` is one request on its way, `pipeline` the list of stages it passes, `config` the file all are described in.
`app` takes requests in and lets the pipeline work, `relay` carries bytes between client and engine, `routing` knows the
engines: which are well, how busy they are, which of them is to answer. `auth` says who asks. Each policy (limits,
filters, queue) is a package that is a library first and has a stage at its end.
"""
