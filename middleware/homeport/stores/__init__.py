"""Stores: the port (:mod:`homeport.stores.base`) and the two that homeport ships."""
