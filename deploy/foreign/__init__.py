"""Weights in files of other programs and formats, under this program's names; opened when --weights names one."""
