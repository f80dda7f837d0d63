"""SolarWM as a build graph: training and inference operations for camera-controlled video world models."""

__version__ = "0.1.0"
