"""LightningModules and LightningDataModules as models and data, recognised by their methods: Lightning is optional."""
