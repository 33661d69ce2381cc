"""Who trains together, and how they talk."""
