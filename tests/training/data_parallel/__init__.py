"""Tests of training on several devices."""
