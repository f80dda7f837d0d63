"""Configuration: schema, routes, geometry, loading and identity. Imports neither torch nor numpy."""
