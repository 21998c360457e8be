"""Files that go with a deployment. `prometheus`: rules and an example of a configuration; `grafana`: dashboards."""
