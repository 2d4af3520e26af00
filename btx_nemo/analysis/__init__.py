"""Pictures of what was measured: drawing only."""
