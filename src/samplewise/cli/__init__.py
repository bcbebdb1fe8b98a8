"""Command line interface, one file per command.

main          the typer application; prints one line for a bad argument
train         samplewise train RECIPE
training      the training of `samplewise train`, after the arguments are checked; ids for its ledger
doctor        samplewise doctor [RECIPE]
recipe_check  the checks of `samplewise doctor RECIPE`
environment   versions and machine, printed by `samplewise doctor`
zoo           samplewise doctor --zoo
report        samplewise report RUN
attribute     samplewise attribute RECIPE
privacy       samplewise privacy
demo          samplewise demo
arguments     arguments shared by several commands, and the completion of their paths by shells
recipe_source content of the user's file, the names that it defines, and the errors of recipes
recipe        loading of the user's file; errors in it are shown with the user's lines only
stdio         write errors on standard output and standard error, notices of slow operations
"""
