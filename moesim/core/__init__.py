"""Units, text, YAML, files and the terminal: what every other package stands on."""
