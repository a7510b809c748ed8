"""Python code that the built-in recipes name: models and data sets. Their YAML is in `conf/`."""
