"""The llama-server behind the sidecar: control calls, traits, and starting one."""
