"""The parts of ``gpu_check.py``; nothing in here but the sections imports torch or triton."""
