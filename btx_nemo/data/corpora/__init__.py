"""Text that every Python carries, as documents; one file per demo domain."""
