"""Option groups, execution strategies and backend checks."""
