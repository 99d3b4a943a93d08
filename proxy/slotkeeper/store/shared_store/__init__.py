"""The cold tier that several sidecars share: S3 or a folder, optional."""
