"""Configuration files, shipped as package data."""
