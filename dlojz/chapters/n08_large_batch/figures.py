"""placeholder until exp08"""
