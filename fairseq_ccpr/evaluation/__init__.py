"""Measuring: translation quality, retrieval accuracy, tuning, speed, and pages that explain a translation."""
