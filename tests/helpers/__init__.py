"""Helpers that tests share: real ranks (`ranks`), leak detection (`leaks`) and the plain reference loop (`reference`)."""
