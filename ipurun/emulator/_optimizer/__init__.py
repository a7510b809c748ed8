"""Optimizers on the device: conversion, update rules and state."""
