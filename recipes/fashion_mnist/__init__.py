"""The clothes classifier of Graphcore's PopTorch porting tutorials."""
