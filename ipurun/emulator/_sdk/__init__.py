"""Stand-ins for modules of the Poplar SDK that programs import beside PopTorch."""
