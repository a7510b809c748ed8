"""What a config will need and do on IPUs, told before anything is compiled. Plain arithmetic: nothing imports torch."""
