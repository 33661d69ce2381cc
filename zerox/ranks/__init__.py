"""The ranks that train together, and how they communicate."""
