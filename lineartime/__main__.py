from lineartime.cli.verbs import main

main()
