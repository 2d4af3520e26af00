"""Embeddings of domains: what Nexus's router and FlexOlmo's fresh rows start from."""
