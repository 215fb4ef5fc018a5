"""The one configuration of all services: file, environment, flags."""
