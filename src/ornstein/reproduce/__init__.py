"""The paper's tables, rebuilt from recipes."""
