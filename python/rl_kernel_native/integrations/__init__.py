"""This library's operators inside of models and frameworks of others. Imports operators, never the other way round."""
