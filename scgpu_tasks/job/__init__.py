"""The main job: its steps, their saved outputs, its command line and its record."""
