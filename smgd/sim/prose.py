"""What the simulated model has read: the sentences from which it learns which token may follow.

One sentence a line. They are plain on purpose: what the simulator says should read like English,
show every sort of character that a stream can carry (digits, quotes, accents, other scripts,
emoji), and mean nothing to anybody. The built-in tokenizer is trained on them too.
"""

from __future__ import annotations

_TEXT = """
The lighthouse keeper counts the ships before he writes the first line of the day.
A small boat leaves the harbour when the tide turns, and nobody on the quay waves.
Rain had fallen all night, so the path to the mill was soft and the river was brown.
She opened the window, listened for a while, and closed it again without a word.
The old map shows a bridge where today there is only a row of tall poplar trees.
Nobody remembers who planted the garden, but everyone has eaten the apples from it.
The train was late by seven minutes, which in this town is almost a public holiday.
He keeps three clocks in the kitchen, and each of them is certain about the time.
When the lamp went out, the children told stories until the moon came over the roof.
The baker begins at four in the morning because bread does not wait for daylight.
A cat sat on the warm stone wall and watched the market as if she owned all of it.
The library closes at six, yet the light in the reading room stays on until midnight.
My neighbour repairs violins and says that every one of them has a memory of winter.
The road climbs slowly through the forest and ends at a lake that has no name.
On Tuesday the post office sells more stamps than on all the other days together.
They built the tower in twelve years, and then they argued for twenty about the bell.
A good carpenter measures twice, cuts once, and keeps the short pieces for the stove.
The river is wide here, and in spring you can hear the ice break from a mile away.
If you follow the fence to the corner, you will find the key under the third post.
The teacher asked a simple question, and the whole class looked at the ceiling.
Snow makes the city quiet, so that even the trams seem to walk on their toes.
The museum bought a painting of a cow, and since then the number of visitors has doubled.
In the evening the wind drops, the smoke rises straight, and the dogs stop barking.
The captain trusts the barometer, the cook trusts the captain, and nobody trusts the cook.
There is a shop behind the station that sells nothing but buttons and good advice.
The mountain looks close in the morning and far away in the afternoon.
We carried the piano up four flights of stairs, and it has been out of tune ever since.
The clerk stamped the form, smiled politely, and sent us to another window.
A letter from the coast takes two days, but a rumour arrives within the hour.
The orchestra rehearses in the old factory because the walls there forgive mistakes.
Every autumn the storks gather on the meadow and hold what looks like a meeting.
The pump in the square has been broken for years, but people still meet beside it.
He learned to swim in the canal, to read from newspapers, and to cook by accident.
The valley is so narrow that the sun needs an appointment to shine into it.
A bicycle leans against the church door, and nobody has claimed it since March.
The engineers tested the bridge with forty trucks full of sand, and it held.
The soup was hot, the bread was fresh, and the conversation lasted until closing time.
From the hill you can see three villages, two rivers, and one very large cloud.
The gardener speaks to the roses in the morning and to the weeds with a spade.
The ferry runs every half hour unless there is fog, in which case it runs by hope.
She writes her notes in green ink so that nobody mistakes them for instructions.
The workshop smells of oil, wood and coffee, in that order.
The harvest was good, so the barns are full and the mice are in excellent spirits.
A stranger asked for the way to the sea, and four people pointed in four directions.
The violinist dropped her bow, laughed, and began the piece again from the beginning.
The bus stops in front of the school, where it waits for those who are still asleep.
They found an old coin in the field and gave it to the museum, which has many of them.
The printer prints slowly, but it has never made a mistake on a Monday.
Above the door hangs a wooden fish, and inside they sell the best cheese in the region.
The weather report promised sunshine, therefore everybody took an umbrella.
In winter the fishermen mend their nets and tell each other the same four stories.
The glass was thin, the wine was young, and the speech was longer than expected.
The surveyor drew a straight line on the map, and the cows have ignored it ever since.
It takes nine minutes to walk to the station and eleven to walk back.
The astronomer sleeps during the day and complains about the street lamps at night.
Our dog is afraid of balloons, umbrellas and the sound of his own name.
The theatre has ninety seats, and on a good night you will find a friend in each of them.
The stone steps are worn in the middle, where a thousand years of feet have passed.
She bought a ticket for the first ship, without asking where it was going.
The tailor marks the cloth with chalk and hums a song that has no end.
He read the manual twice, then threw it away and pressed the red button.
The students planted a tree behind the laboratory and named it after their professor.
A narrow street leads from the market to the river, and it is never quite empty.
The clock on the town hall is five minutes fast, which is why nobody here is ever late.
The mayor opened the new well with a speech about water, and then it began to rain.
The desert is not silent at all; it hums like a wire when the wind comes from the north.
The cook adds the salt last, because salt has opinions.
The kite rose above the roofs and pulled so hard that the boy had to run.
In the attic we found a box of letters, a broken radio and a family of bats.
The pilot greeted the passengers in three languages and landed in a fourth.
The walls of the old fort are covered with ivy, and the ivy is covered with snails.
Two men carried a mirror across the square, and for a moment there were two squares.
The river changes its bed every hundred years, and the farmers keep the old names.
The shop window shows a single pair of boots and a card that says they are not for sale.
The doctor prescribed a walk along the harbour, twice a day, with company if possible.
The choir sings on Sundays, on holidays, and whenever the heating fails.
The night watchman knows every door in the building by the sound that it makes.
Honey keeps for centuries, secrets for a week, and fish until the afternoon.
The glacier moves a hand's breadth each day and has never been seen to hurry.
The students measured the shadow of the tower and calculated the age of the caretaker.
A new path was cut through the reeds so that the herons could be seen from the train.
The bees came back in April, and with them came the man who sells the jars.
The last house in the village has a blue door and a view of everything.
He sharpened the pencil until there was more shavings than pencil.
The frost drew ferns on the window, and the sun erased them before breakfast.
A ladder, a lantern and a long rope are all that you need to visit the old mine.
The judge listened to both farmers and decided that the goat should choose.
The tunnel is two miles long, and halfway through it there is a painted mark.
They measured the depth of the lake with a stone and a string, and ran out of string.
The baker's daughter studies chemistry and says that it is the same thing with gloves.
The winter road across the bay opens in January and closes when the first truck sinks.
The archive keeps every letter that was ever sent to the wrong address.
The parrot repeats the news in the evening, with small corrections.
The new bridge hums in the wind at a pitch slightly below the middle of the piano.
At noon the square is empty, apart from a pigeon that seems to be waiting for someone.
The ship was built for cargo, but it carries mostly stories these days.
The radio plays dance music for the cows, who prefer the weather forecast.
The potter breaks one bowl in ten on purpose, so that the shelf does not get proud.
The island has one road, one car and a long list of traffic rules.
The winner received a ham, and the runner-up received advice on how to win a ham.
A thin line of smoke showed where the charcoal burners had made their camp.
The school orchestra has nine flutes, one drum and a great deal of confidence.
The hedgehog crosses the road at the same time every night, and traffic has adapted.
The recipe asks for 250 grams of flour, 3 eggs and a quiet afternoon.
The tower is 48 metres high, which makes 212 steps or 9 pauses.
Room 17 is on the second floor; the stairs are closed between 10 and 11 o'clock.
The temperature fell from 12 degrees to 4, and the swimmers stayed in until 5.
In 1904 the mill burned down, and in 1907 it was built again, exactly as it was.
The ticket costs 3.50 for adults, 1.75 for children and nothing for dogs under 30 cm.
About 60% of the visitors come for the view; the other 40% were looking for the exit.
The file has 1024 lines, of which 1000 are comments and 24 are apologies.
Flight 382 leaves from gate 6 at 14:25, unless the fog (which is likely) has other plans.
The formula is simple: take half of x, add 7, and round up to the next even number.
"Is the harbour still open?" asked the pilot, and the fog answered with a long low horn.
"Not today," said the clerk, "but you may leave your name, your hat and a small deposit."
"We have time," she said, and put the kettle on the stove.
The sign says "closed", the door says "pull", and the owner says that both are wrong.
He called it "a minor improvement"; the neighbours called it "that thing in the yard".
The café on the corner serves crème brûlée, strong tea and very weak jokes.
Señor Ibáñez repairs clocks in the Calle Mayor and is always late for dinner.
The naïve plan worked: they simply asked the goose to leave, and it left.
Frau Müller grows tomatoes on the balcony, and the whole street knows when they are ripe.
The ferry to Tromsø takes eleven hours — longer if the captain tells his stories.
The word 海 means sea, and the word 山 means mountain; the valley has to share them.
The shop sign reads 東京 on one side and "welcome" on the other.
In the harbour a boat named Надежда is waiting for paint and a new engine.
Above the gate somebody carved the word σοφία, and below it the opening hours.
The children shouted שלום from the bridge, and the boatman raised his cap.
The final message was short: all well, good wind, home on Friday 🙂.
Everyone brought a candle, the cake was enormous, and the dog wore a hat 🎉.
The sailors paint a small star ⭐ beside the name of every harbour that they liked.
The rule is easy to remember: if it hums, leave it; if it rattles, oil it.
The garden gate is never locked (the key was lost in 1931), but please knock anyway.
The list was short: one hammer, two saws, a box of nails and a great deal of patience.
Some things improve with age, namely cheese, violins and certain excuses.
The committee met on Monday, on Wednesday and, to be safe, on Friday as well.
Would you rather cross the river by the bridge, by the ferry or by the season?
Why does the last piece of the puzzle always belong to another puzzle?
How long does it take for a footprint in the sand to forget the foot?
Who would have thought that the quietest street leads to the loudest square?
What a splendid morning it was, with frost on the grass and smoke over the roofs!
Never argue with a goose in front of its friends!
The moral of the story is that nobody should lend a ladder to a poet.
The wind turned at noon, the boats turned with it, and dinner was early.
First the clouds came, then the rain, and finally the man who sells umbrellas.
The cellar is cool in summer, dry in winter and full of potatoes in between.
The watchmaker keeps the smallest screws in a matchbox and the matches in a drawer.
It was the kind of evening on which even the accountants look at the stars.
The horse knew the way home, which was fortunate, because the driver did not.
After the concert the musicians packed their instruments and argued about the tempo.
A good question is worth more than a quick answer, but it is paid less often.
The village elected a mayor, a deputy and, after some discussion, a second deputy.
The bell rings for weddings, for fires and by mistake on most Thursdays.
The painter waited eleven days for the right light and then painted indoors.
The lake freezes from the edges, and patience freezes from the middle.
The stranger paid in silver, spoke of the weather and left before the coffee came.
In the end they kept the bridge, moved the river a little, and called it a success.
"""

SENTENCES: tuple[str, ...] = tuple(_TEXT.strip().splitlines())
