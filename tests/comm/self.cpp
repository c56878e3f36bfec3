// alone
#include <doctest/doctest.h>

#include <tessera/comm/self.hpp>

struct model {
  template <class Body>
  static void run(Body body, tessera::comm::communicator_options options = {}) {
    tessera::comm::self alone(options);
    body(alone);
  }
};

#include "comm/conformance.hpp"

using namespace tessera;

TEST_CASE("a message to oneself whose other side was not started is an error, not a wait for ever") {
  comm::self alone;
  std::vector<float> data(3);
  try {
    alone.receive(std::span(data), 0, 5);
    FAIL("received from nobody");
  } catch (stalled const& e) {
    CHECK(std::string(e.id()) == "E-comm-020");
    CHECK(std::string(e.what()).find("receive from rank 0 of 3 fp32 at self.cpp:") != std::string::npos);
  }
  CHECK_THROWS_AS(alone.barrier(), peer_failed); // after that the communicator is lost
}

TEST_CASE("the two sides of a message to oneself have one length and one type") {
  comm::self alone;
  std::vector<float> three(3), four(4);
  auto received = alone.start_receive(std::span(three), 0, 1);
  CHECK_THROWS_AS(alone.send(std::span(four), 0, 1), collective_mismatch);
  CHECK_THROWS_AS(received.wait(), collective_mismatch);
}
