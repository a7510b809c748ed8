"""The machine that runs: Graphcore's command-line tools, its limits, and what a bug report needs."""
