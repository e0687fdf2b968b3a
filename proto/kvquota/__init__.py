"""Elastic KV caches under live quotas. This file keeps a checkout called `kvquota` from being the package."""
