"""Command line interface, one file per command.

main          the typer application; prints one line for a bad argument
train         samplewise train RECIPE
training      the training of `samplewise train`, after the arguments are checked
doctor        samplewise doctor [RECIPE]
recipe_check  the checks of `samplewise doctor RECIPE`
environment   versions and machine, printed by `samplewise doctor`
zoo           samplewise doctor --zoo
report        samplewise report RUN
attribute     samplewise attribute RECIPE
privacy       samplewise privacy
demo          samplewise demo
wrong_labels  the training of `samplewise demo`
completion    recipes and run directories for the completion of shells
arguments     arguments shared by several commands
definitions   names that a recipe defines, and near misses of the names it may have
ids           ids in the batches of a recipe, for samplewise train --ledger
recipe_file   content of the user's file, and the errors of recipes
recipe        loading of the user's file; errors in it are shown with the user's lines only
output        write errors on standard output and standard error
"""
