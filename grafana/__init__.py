"""What Prometheus and Grafana need to show and watch a sidecar, written from code: `python -m grafana`.

`dashboards` and two files of `prometheus` are written; `provisioning` and `prometheus/prometheus.yaml`
are not.
"""
