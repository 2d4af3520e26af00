"""What tests share. Not named `tests`: other packages install a top-level package of that name."""
