"""Parameters between steps: the gather that makes them whole again, hidden or not, and those that no wrapper has."""
