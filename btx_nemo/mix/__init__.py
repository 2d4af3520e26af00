"""Assembling one mixture of experts from dense models that were trained apart."""
