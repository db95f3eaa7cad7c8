# make test        what CI runs: installs what is missing, then every check; at most 40 minutes from nothing
# make test-full   all corpora, long kill and fault loops, the figures as JSON in target/figures
# make demo        this machine's own /usr and /etc as an image, and a container that starts from it
# make bench NAME=walk   one benchmark; `cargo xtask bench --help` lists them
# make clean-tests removes what an interrupted run left mounted or lying about

.PHONY: all test test-full demo bench packages clean-tests

all:
	cargo build --release --locked -p lazyroot

test:
	@sh scripts/test.sh

test-full:
	@sh scripts/test.sh --full

demo:
	@sh scripts/demo.sh

bench:
	@sh scripts/packages.sh build bench
	@cargo xtask bench $(NAME)

packages:
	@sh scripts/packages.sh build test demo

clean-tests:
	@cargo run --locked -q -p xtask -- clean
