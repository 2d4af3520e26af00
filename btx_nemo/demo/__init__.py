"""The whole pipeline, small, on this machine."""
