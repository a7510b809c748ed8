"""Models and data sets of the built-in recipes. Their YAML is in `conf/`."""
