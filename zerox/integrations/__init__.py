"""Under other libraries' training loops: a module for each, which imports that library. zerox itself imports none."""
