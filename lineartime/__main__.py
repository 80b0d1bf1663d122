from lineartime.cli import main

main()
