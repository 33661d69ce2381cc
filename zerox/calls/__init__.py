"""What may be called between backward and step(), and what happens whenever ranks synchronize."""
