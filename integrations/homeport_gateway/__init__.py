"""A streaming reverse proxy over plain upstream URLs, with homeport in front."""
