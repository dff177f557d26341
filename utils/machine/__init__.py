"""Devices, processors, memory and optional packages of this machine."""
